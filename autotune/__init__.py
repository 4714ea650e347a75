"""The tuner: looks at kernels without a card, measures candidates on one, stores the fastest."""
