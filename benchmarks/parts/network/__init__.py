"""Networks for benchmarks: machines as network namespaces, with links that are as slow as is asked."""
