"""A translator in the formats of others, and theirs as a translator."""
