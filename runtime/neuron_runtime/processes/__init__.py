"""Everything that starts, watches, ends or restarts a process: the supervisor and the processes that it runs."""
