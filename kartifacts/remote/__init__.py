"""What reading from and writing to S3, OCI registries and web servers have in common: addresses, logins, faults."""
