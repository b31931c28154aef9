"""What others ask of the coordinator: one file for each asker or thing asked, and the path that every request takes."""
