"""What is believed of whom: access tokens, rates, audits, reputation."""
