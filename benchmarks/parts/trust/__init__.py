"""Parts of the trust benchmark: workers that lie."""
