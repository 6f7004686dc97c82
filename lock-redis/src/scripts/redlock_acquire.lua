-- ARGV: 4 ttl in ms, 5 server time in ms when the claim must have ended, 6 the client, 7 the number of its attempt, 8 what to keep of the
-- holder, 9 the proposed token: us of the servers' clocks, or 0.
-- A proposal that is older (us) may be below tokens that this node has forgotten: its data may be an older copy.
local FRESH = 500000
local state, age, _, differs = born()
if differs then
    return differs
end
if state == 'new' and age < tonumber(MAX_TTL) then
    -- Leases that the node has lost may be valid.
    return { 'young', stamp, math.ceil(MAX_TTL - age) }
end
local life = life_of(ARGV[4], ARGV[5])
if not life then
    return { 'late', stamp }
end
local client = ARGV[6] .. '#'
local value = held()
if owner_of(value) == OWNER then
    -- The first write needs no memory, so that a full server does not refuse the second one.
    redis.call('PEXPIRE', LOCK, math.max(life, redis.call('PTTL', LOCK)))
    local before, asker, attempt, info = string.match(value, '^(%d+ %S+ %d+ %d+ )([^ #]+#)(%d+)( .*)$')
    -- A request that the network held back does not undo a later one.
    if before and (asker ~= client or tonumber(attempt) < tonumber(ARGV[7])) then
        redis.call('SET', LOCK, before .. client .. ARGV[7] .. info, 'KEEPTTL')
    end
    return { 'granted', stamp, token_of(value), life }
end
if value then
    return { 'busy', stamp, redis.call('PTTL', LOCK), value }
end
-- The token: higher than the last one, and the proposal if that is possible, so that nodes agree.
local last = redis.call('GET', FENCE)
if last and not string.match(last, '^%d+$') then
    error('fencelock: foreign value in ' .. FENCE)
end
local proposal = tonumber(ARGV[9])
local behind = now_us - proposal
-- A counter that has expired was below the proposal. One that was lost may have been above it, but not above the clock.
local usable = behind >= 0 and behind < FRESH and (last or age >= tonumber(RETENTION))
local token = math.max(tonumber(last or 0) + 1, usable and proposal or now_us)
if token > TOP_TOKEN then
    error('fencelock: foreign value in ' .. FENCE)
end
token = text(token)
count(token)
hold(OWNER, token, life, client .. ARGV[7], ARGV[8])
return { 'granted', stamp, token, life }
