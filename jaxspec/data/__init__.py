"""Problems, and text as tokens."""
