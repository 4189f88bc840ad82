"""What of Antiphon only a GPU can show: the checks, and the program that runs them one by one."""
