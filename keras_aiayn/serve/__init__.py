"""A translator as a service over HTTP."""
