"""What algorithm="auto" means."""
