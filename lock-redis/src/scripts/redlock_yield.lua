-- ARGV: 9 '2' to give the node to the earliest waiter, which may be this one.
if ARGV[9] == '2' and owner_of(redis.call('GET', LOCK)) == OWNER and redis.call('EXISTS', ORDER) == 1 then
    redis.call('DEL', LOCK)
    enqueue(OWNER, nil, tonumber(ARGV[4]), life, ARGV[6], ARGV[7], ARGV[8], 1, PLACE > 0 and PLACE or nil)
end
