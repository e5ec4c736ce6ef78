"""Values without I/O: archs, ops and specs, digests, manifests and the layout of a repository."""
