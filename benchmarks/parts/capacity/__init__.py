"""Parts of the benchmarks of the capacity model: loops and fleets drawn at random, and the published runs."""
