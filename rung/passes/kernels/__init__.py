"""Our own kernels behind IR ops, and how they are launched."""
