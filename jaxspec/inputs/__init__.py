"""What people give, as typed and checked values, with messages that name the place."""
