local released, more = let_go(OWNER)
return { released, stamp, more }
