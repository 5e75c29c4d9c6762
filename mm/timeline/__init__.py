"""The timeline of a step: what each rank did, and when; its shares of time, its picture, its trace, and its files."""
