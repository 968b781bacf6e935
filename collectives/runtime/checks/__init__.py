"""How mismatched calls and ranks that wait in vain are found."""
