"""Modelled runs: whole fleets under virtual time, their engines stepped by a model instead of by message."""
