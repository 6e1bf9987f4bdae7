"""Problems, and text to train on."""
