-- Stands for itself, so that looking changes nothing. KEYS: locks. The value of each and the time that it has to go, or 'foreign'
-- instead of the time for a key of another type.
local found = {}
for at, key in ipairs(KEYS) do
    local value = redis.pcall('GET', key)
    local failed = type(value) == 'table' and value.err
    if failed and not string.find(failed, 'WRONGTYPE', 1, true) then
        return value
    end
    found[2 * at - 1] = not failed and value
    found[2 * at] = failed and 'foreign' or redis.call('PTTL', key)
end
return found
