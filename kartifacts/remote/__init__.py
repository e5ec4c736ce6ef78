"""What reading from and writing to S3 and OCI registries have in common: addresses, logins, faults."""
