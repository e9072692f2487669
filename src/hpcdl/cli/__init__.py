"""The hpcdl command."""
