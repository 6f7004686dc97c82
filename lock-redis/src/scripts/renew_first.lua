-- ARGV: 3 ttl in ms, 4 server time in ms when the request is too late.
local value = redis.call('GET', LOCK)
if owner_of(value) == OWNER then
    if now > tonumber(ARGV[4]) then
        return { 'late', stamp }
    end
    redis.call('PEXPIRE', LOCK, ARGV[3])
    return { 'renewed', stamp }
end
