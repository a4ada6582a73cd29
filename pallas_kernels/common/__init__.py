"""What several kernels share."""
