"""What is known about a dataset before training?  Every record is checked and measured once; the result is cached."""
