"""Parts of the fuzz benchmark: what is fed with damaged input, and how it is damaged."""
