"""Which tokens sample g holds: the order of documents, samples cut out of them, blends of several corpora."""
