-- ARGV: 4 ttl in ms, 5 server time in ms when the request is too late.
local value = redis.call('GET', LOCK)
if owner_of(value) == OWNER then
    if now > tonumber(ARGV[5]) then
        return { 'late', stamp }
    end
    redis.call('PEXPIRE', LOCK, ARGV[4])
    return { 'renewed', stamp }
end
