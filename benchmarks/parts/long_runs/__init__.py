"""Long runs: journals of many events, made without a run, and what reading one costs."""
