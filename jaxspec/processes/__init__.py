"""The processes of a job: how they are told of each other, meet, and notice that one has ended."""
