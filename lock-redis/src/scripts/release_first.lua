-- Nobody waits.
if redis.call('EXISTS', ORDER) == 0 then
    local released = owner_of(redis.call('GET', LOCK)) == OWNER
    if released then
        redis.call('DEL', LOCK)
    end
    return { released and 'released' or 'lost', stamp, 0 }
end
