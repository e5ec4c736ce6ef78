"""The file system as all packages meet it: reading within bounds, locks, faults, and whom a path can be trusted to."""
