-- What a node of several independent servers does.
-- KEYS: 5 since when this node has its data.
-- ARGV: 4 what to do; the last three: how many nodes the client knows, the run id of the process that it is connected to, and the longest ttl that
-- clients may ask for (ms).
local BORN = KEYS[5]
local NODES, PROCESS, MAX_TTL = ARGV[#ARGV - 2], ARGV[#ARGV - 1], ARGV[#ARGV]

local function set_born(state, since, nodes, max_ttl)
    redis.call('SET', BORN, table.concat({ state, since, PROCESS, nodes, max_ttl }, ' '))
end

-- Since when the node has its data: 'new', or 'open' if it may grant at once; for how many ms; and the stamp. A node that has lost its
-- data begins anew, and so does one that was restarted: what it has loaded may be an older copy. The fourth result is an answer if the
-- client disagrees with those before it: their majorities may have no node in common, or a node may grant too early.
local function born()
    local state, since, process, nodes, max_ttl =
        string.match(redis.call('GET', BORN) or '', '^(%l+) (%d+) (%S+) (%d+) (%d+)$')
    if process ~= PROCESS or tonumber(since) > now_us then
        state, since, nodes, max_ttl = 'new', stamp, nodes or NODES, max_ttl or MAX_TTL
        set_born(state, since, nodes, max_ttl)
    end
    local differs = (nodes ~= NODES or max_ttl ~= MAX_TTL) and { 'differs', stamp, nodes, max_ttl }
    return state, (now_us - tonumber(since)) / 1000, since, differs
end

-- Sets the counter, which is needed until the clock has passed it for good.
local function count(token)
    redis.call('SET', FENCE, token, 'PX', math.max(0, math.ceil((tonumber(token) - now_us) / 1000)) + RETENTION)
end

if ARGV[4] == 'release' then
    -- ARGV: 5 the client, 6 the number of its last attempt before this request.
    local value = redis.call('GET', LOCK)
    -- What a later attempt of the same claim was granted stays, however late this request arrives.
    local client, attempt = string.match(value or '', '^%d+ %S+ %d+ %d+ ([^ #]+)#(%d+) ')
    local is_later = client == ARGV[5] and tonumber(attempt) > tonumber(ARGV[6])
    local released = owner_of(value) == OWNER and not is_later
    if released then
        redis.call('DEL', LOCK)
    end
    return { released and 'released' or 'lost', stamp }
end
if ARGV[4] == 'confirm' then
    -- ARGV: 5 the token that the node has granted, 6 the token that the majority shall have.
    -- A node that granted the claim anew since then has perhaps lost what it had granted before, so it does not count.
    local value = redis.call('GET', LOCK)
    local stored = owner_of(value) == OWNER and token_of(value)
    if not stored or stored ~= ARGV[5] and stored ~= ARGV[6] then
        return { 'lost', stamp }
    end
    if tonumber(redis.call('GET', FENCE) or '0') < tonumber(ARGV[6]) then
        count(ARGV[6])
    end
    if stored ~= ARGV[6] then
        redis.call('SET', LOCK, (string.gsub(value, '^(%d+ %S+ )%d+', '%1' .. ARGV[6])), 'KEEPTTL')
    end
    return { 'confirmed', stamp }
end
local state, age, since, differs = born()
if differs then
    return differs
end
if ARGV[4] == 'born' then
    -- ARGV: 5 a stamp: if the node has its data since then, it may grant at once.
    if state == 'new' and since == ARGV[5] then
        state = 'open'
        set_born(state, since, NODES, MAX_TTL)
    end
    return { state, stamp, math.floor(age), since }
end
-- To acquire. ARGV: 5 ttl in ms, 6 server time in ms when the claim must have ended, 7 the client, 8 the number of its attempt, 9 what to keep
-- of the holder, 10 the proposed token: us of the servers' clocks, or 0.
-- A proposal that is older (us) may be below tokens that this node has forgotten: its data may be an older copy.
local FRESH = 500000
if state == 'new' and age < tonumber(MAX_TTL) then
    -- Leases that the node has lost may be valid.
    return { 'young', stamp, math.ceil(MAX_TTL - age) }
end
local life = life_of(ARGV[5], ARGV[6])
if not life then
    return { 'late', stamp }
end
local client = ARGV[7] .. '#'
local value = held()
if owner_of(value) == OWNER then
    -- The first write needs no memory, so that a full server does not refuse the second one.
    redis.call('PEXPIRE', LOCK, math.max(life, redis.call('PTTL', LOCK)))
    local before, asker, attempt, info = string.match(value, '^(%d+ %S+ %d+ %d+ )([^ #]+#)(%d+)( .*)$')
    -- A request that the network held back does not undo a later one.
    if before and (asker ~= client or tonumber(attempt) < tonumber(ARGV[8])) then
        redis.call('SET', LOCK, before .. client .. ARGV[8] .. info, 'KEEPTTL')
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
local proposal = tonumber(ARGV[10])
local behind = now_us - proposal
-- A counter that has expired was below the proposal. One that was lost may have been above it, but not above the clock.
local usable = behind >= 0 and behind < FRESH and (last or age >= tonumber(RETENTION))
local token = math.max(tonumber(last or 0) + 1, usable and proposal or now_us)
if token > TOP_TOKEN then
    error('fencelock: foreign value in ' .. FENCE)
end
token = text(token)
count(token)
hold(OWNER, token, life, client .. ARGV[8], ARGV[9])
return { 'granted', stamp, token, life }
