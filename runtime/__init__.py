"""Draft, schedule, verify: sampling, rejection, sessions."""
