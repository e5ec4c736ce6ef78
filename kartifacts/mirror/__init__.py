"""Copies of a repository that hold no keys and serve its bytes unchanged."""
