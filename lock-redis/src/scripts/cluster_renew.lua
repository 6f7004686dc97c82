-- The lock alone can be read and written while the slot is moved. Whether there is a waiter to be served, another script finds out.
return { 'lost', stamp, 1 }
