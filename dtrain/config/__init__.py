"""Every word a user can say: its schema, its grammar, its files, its constraints."""
