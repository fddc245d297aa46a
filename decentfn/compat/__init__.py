"""Other libraries' habits, for checking that nothing changed when one moves over. Never a default here."""
