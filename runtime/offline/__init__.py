"""State without a job: that of a savepoint or a checkpoint read as tables of Arrow, and written anew."""
