"""`fk bench`: suites, timers, peers and reports."""
