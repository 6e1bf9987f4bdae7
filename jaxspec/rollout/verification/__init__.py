"""Target and draft compared over the vocabulary: the plain form, and its fast twin."""
