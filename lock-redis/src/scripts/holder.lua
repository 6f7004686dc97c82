-- Stands for itself, so that looking changes nothing. KEYS: locks. The value of each and the time that it has to go.
local found = {}
for at, key in ipairs(KEYS) do
    found[2 * at - 1] = redis.call('GET', key)
    found[2 * at] = redis.call('PTTL', key)
end
return found
