"""A run's own authority: who was invited, who has which certificate, and who was removed."""
