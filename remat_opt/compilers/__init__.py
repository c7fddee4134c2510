"""What compilers store, hold beside and lay out. The only room that knows one from another."""
