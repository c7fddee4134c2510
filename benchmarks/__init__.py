"""Programs that measure remat_opt; not part of the installed package."""
