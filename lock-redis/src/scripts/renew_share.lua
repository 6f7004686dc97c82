-- The same as renew.lua for a hold that does not exclude others. KEYS: of the holds the ends and the records alone, which are both stored, so that
-- they can be read and written also while their slot is moved.
HOLDERS, RECORDS = KEYS[1], KEYS[2]
-- include shares.lua
local left, value = shared_by(OWNER)
-- A write that needs no memory, so that a full server does not refuse those behind it. A replica refuses it: what it lacks, its primary may have.
redis.call('HDEL', RECORDS, '')
if left > 0 and value and (ARGV[7] == '' or token_of(value) == ARGV[7]) then
    if now > tonumber(ARGV[5]) then
        return { 'late', stamp }
    end
    lasts(OWNER, tonumber(ARGV[4]))
    return { 'renewed', stamp }
end
return { 'lost', stamp }
