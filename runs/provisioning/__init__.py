"""Provisioning: workers of a pool are started and drained as the run needs them."""
