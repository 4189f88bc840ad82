"""Servers that a run or `antiphon up` starts beside it: Prefect, S3."""
