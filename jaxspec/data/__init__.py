"""Problems and texts to train on."""
