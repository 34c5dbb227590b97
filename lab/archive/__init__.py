"""Studies whose programs are gone: their pages, their lines and what makes tables of them."""
