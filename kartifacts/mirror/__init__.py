"""Copies of a repository that hold no keys: filled from elsewhere, proved complete, carried across an air gap."""
