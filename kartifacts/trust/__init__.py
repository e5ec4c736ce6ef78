"""Signed metadata (TUF): who may say what a release is, and how a reader comes to believe it."""
