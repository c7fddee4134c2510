"""What compilers store, hold in addition and lay out. Only this room distinguishes them."""
